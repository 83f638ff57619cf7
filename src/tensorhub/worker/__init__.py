"""A worker's own side, pure: what its memory holds, who may read it, what its calls wait for."""
