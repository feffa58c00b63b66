"""How functions are compiled. What is not asked for here is most of what Numba would have to compile.

A way in from Python takes as long as a small function. Arrays only pass through here, so nobody counts who has them,
which would be half of the code; nothing compiled may make one. What is divided by 0 is 0, and nothing is raised.
"""

from numba import njit

OPTIONS = {"nogil": True, "error_model": "numpy", "_nrt": False}
# For functions that only compiled code calls, by their name or by the address that link.entry_point gives.
INNER = OPTIONS | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}

compiled = njit(cache=True, **OPTIONS)
inner = njit(cache=True, **INNER)
# Called from one place: compiling it there costs less than compiling it apart.
merged = njit(inline="always", **INNER)


def inner_copy(dispatcher, **more):
    """The same function for compiled callers alone. inline="always", for one that has a single caller, saves compiling
    it apart.

    It is in its callers' cache as a whole; one of its own would be the cache of the function that it was made from.
    """
    options = {**dispatcher.targetoptions, **INNER, **more}
    options.pop("nopython", None)
    return njit(**options)(dispatcher.py_func)
