"""The same splits through PyTorch's own classes: what the from-scratch ones are held against."""
