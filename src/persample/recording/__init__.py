"""The front ends that record a model: `record` for a block, `watch` for a model that is trained elsewhere.

Other packages use `record.record`, `watch.watch`, `watch.Watch` and the types in `options`.
"""
