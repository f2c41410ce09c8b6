"""The backward pass: turns the gradient of each use into terms and delivers them by parameter.

Other packages use `collector.Collector` and the `tap` that the forward pass puts on the result of a use.
"""
