"""Tables that live compressed in host memory, and caches of their rows on GPUs."""
