"""The forward pass: follows the samples through every op, finds the uses of weights and runs them.

Other packages use `tracker.Tracker`.
"""
