"""Goals: tasks and their waypoints, users' own goals, how close episodes came to them, and how far
they lie from the data. Never loads torch."""
