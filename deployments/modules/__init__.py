"""The models that one replica has built, and who has to wait."""
