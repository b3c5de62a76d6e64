"""What the kernel families share: activations, row gathers, argument checks, Triton helpers."""
