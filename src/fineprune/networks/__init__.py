"""Networks by name. Each family has a file of its own.

All take float images of shape (B, channels, H, W), and return logits of shape (B, classes).
"""
