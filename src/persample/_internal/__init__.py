"""Small tools without knowledge of gradients: nested containers, autograd graphs, files, text, random numbers.

All packages may use every name of these modules; users should not.
"""
