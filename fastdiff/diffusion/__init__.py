"""Diffusion mathematics: schedules, processes, objective and losses."""
