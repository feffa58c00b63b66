"""The data plane's inner loops: 16-lane vector code made from Python, and Numba functions around it.

Importing this package points Numba's cache at a folder named after the kernel sources and versions.
"""

from millpond.kernels.cache import use_cache_folder

use_cache_folder()
