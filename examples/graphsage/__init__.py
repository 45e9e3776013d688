"""What the two scripts that train GraphSAGE share: graphs, a sampler, a pipeline, the loop."""
