"""Which tokens of which requests run next, over one pool of cache blocks.

Plain Python integers. Knows nothing about arrays, devices or text.
"""
