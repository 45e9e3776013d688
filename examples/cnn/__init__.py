"""Parts of train_cnn_swapped.py: models, images, ways to keep saved tensors, the loop."""
