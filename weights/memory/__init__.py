"""Host memory that bytes pass through on their way."""
