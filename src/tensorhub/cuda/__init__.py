"""GPUs: what the rest needs of one (`device`), CUDA's through cupy (`cupy_device`), the kernels, and memory of other
processes (`ipc`).

cupy is imported when a GPU's tensor is first registered, and never where there is none. Nothing above knows cupy: tests
put a stand-in in the place of a device, whose copies end when the test lets them.

Not responsible for what is copied when, nor for who may read it: a GPU's memory is held to the same rules as any other.
"""
