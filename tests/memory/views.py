"""Regions that the CPU can address."""

from tensorhub.memory.regions import MappedRegions


def views(mapped: MappedRegions) -> list[memoryview]:
    found = [region for region in mapped.regions if isinstance(region, memoryview)]
    assert len(found) == len(mapped.regions)
    return found
