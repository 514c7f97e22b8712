"""What the graph runners share: buckets, static inputs, recordings, and the runner of steps that replays them."""
