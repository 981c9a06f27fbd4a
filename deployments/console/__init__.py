"""What every command uses: tables, progress, the HTTP client, running clusters."""
