"""GPUs: the interface of a device (`device`), CUDA's through cupy (`cupy_device`), the kernels, and
memory of other processes (`ipc`).

cupy is imported when a GPU's tensor is first registered, and never where there is none. Nothing
above knows cupy: tests put a stand-in in the place of a device, with copies that end when the test
lets them.

Not responsible for when bytes are copied, nor for the right to read them: the rules for a GPU's
memory are those for host memory.
"""
