"""The parts of generate_offloaded.py: models, ways to keep weights and caches, output."""
