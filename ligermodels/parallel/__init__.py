"""Many GPUs: `shard(model, mesh)` spreads a model over them, in the layout that the mesh names."""
