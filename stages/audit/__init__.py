"""What the cache says of the teachers themselves: who wins, who is missed, who contradicts whom."""
