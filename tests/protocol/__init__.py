"""A model of the fused peer kernel's protocol, small enough to be searched whole. See docs/fused-kernel.md."""
