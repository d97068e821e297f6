"""Goals: tasks and their waypoints, users' own, how near an episode came to them, how far they lie
from the data. Never loads torch."""
