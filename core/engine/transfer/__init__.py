"""Moving bytes between host, device and file."""
