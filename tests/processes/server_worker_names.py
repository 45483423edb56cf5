"""What workers with split variables run."""

# Over how many devices, of two workers with two each: within a worker, over both.
SERVERS = {"within": 2, "over both": 4}
SHARDS = {"within": ["optimizer", "parameters"], "over both": ["parameters"]}
KINDS = [(servers, shard) for servers in SERVERS for shard in SHARDS[servers]]

NAMES = [
    "data: shuffled",
    "data: arrays",
    "unbuilt",
    "whole-batch mean",
    "run_eagerly",
    "odd parts",
    "large blocks",
    "on_batch",
    "looks of one worker",
]
