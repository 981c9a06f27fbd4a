"""Requests become calls at dispatch: a pure queue that decides, and the asyncio driver that acts. Free of Ray."""
