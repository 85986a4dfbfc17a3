"""Before anything starts CUDA: streams of virtual ranks must not share a queue of the GPU."""

from dcpcomm.testing.loopback import separate_queues

separate_queues()
