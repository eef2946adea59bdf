"""FedCP, and the gate that its personal models have between features and logits."""
