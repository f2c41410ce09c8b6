"""The per-sample gradients as a lazy matrix, and every answer that comes from its structure.

Other packages use `PerSampleGradients`, and `StreamedNorms` and `StreamedClip`, which keep only what was asked for.
"""
