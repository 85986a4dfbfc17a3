"""Before anything starts CUDA: kernels of virtual ranks wait for each other on one GPU."""

from dcpcomm.testing.loopback import side_by_side

side_by_side()
