"""The parts of benchmarks/against_peers.py: other libraries' models and runtimes, growth, conclusions, figures."""
