"""In the place of FlashInfer, on a CPU: what `flashinfer_helix` calls of it, moving data through shared memory."""

__version__ = "0.0.stand-in"
