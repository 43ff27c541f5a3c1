"""The DRA driver: slices of pods hold the shares of GPUs that the scheduler of Kubernetes gives to pods.

A claim is what a pod asks for. A share is one request of a claim on one GPU: an amount of memory and a part of the
time. The scheduler counts what is free by a ResourceSlice, the driver writes a CDI specification for each prepared
claim, and the hook in that sets limits before the container's program begins (docs/kubernetes.md).
"""

NAME = "gpu.ggroup.io"
"""Name of the driver, and vendor of its CDI devices."""
