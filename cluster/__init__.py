"""The control plane: what is resident where, and the Ray session it runs in. No torch."""
