"""`forge serve`: an OpenAI-compatible server. One process speaks HTTP, another turns the engine."""
