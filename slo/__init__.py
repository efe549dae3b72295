"""The vocabulary of latency objectives and every decision rule, as pure Python.

Nothing here reads a clock, touches the network or imports ray, vllm, torch, nixl or asyncio: times and
random generators are passed in, so the servers and any simulation run the very same rules.
"""
