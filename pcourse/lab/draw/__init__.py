"""One module for each picture of the course; `pcourse.lab.plots` offers them all."""
