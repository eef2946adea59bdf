"""GPFL, and the valve that its personal models have between features and logits."""
