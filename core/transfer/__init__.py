"""Moving packed rows across a link."""
