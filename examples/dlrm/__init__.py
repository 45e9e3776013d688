"""What the two DLRM scripts share: clicks to learn from, tables kept in several ways, the model."""
