"""The mathematics of diffusion: schedules, processes, objective and losses."""
