"""Modules of the two GraphSAGE scripts: graphs, a sampler, a pipeline, the training loop."""
