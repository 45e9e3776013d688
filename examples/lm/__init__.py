"""Language models that are trained while their activations leave memory."""
