"""Triton kernels of the CUDA engine. Each file: kernel, launcher, float32 torch reference.

``pdl`` in a launcher means programmatic dependent launch: the kernel may start while its predecessor still runs, reads
only weights until ``gdc_wait`` and then sees all of the predecessor's writes. It hides a launch's ramp-up in the tail
of the kernel before it. Every kernel works without it; under Triton's interpreter it must be off.
"""
