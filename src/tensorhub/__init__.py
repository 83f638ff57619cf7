"""TensorHub: the weights of any live model version, fetched from the memory of the workers that hold them.

This module holds the public names and no logic. Importing it imports no torch.
"""

__version__ = "0.1.0"
