"""For all tests: random draws that a failure can repeat, and a browser."""

pytest_plugins = ["kit.seeding", "kit.browser"]
