"""Host memory that GPUs read: page-locked, shared or mapped, and the locks on it."""
