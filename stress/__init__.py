"""The stress tool: does a training job survive, and is its gradient exact, wherever memory runs out?"""
