"""What the commands `compare`, `path`, `stability`, `dictionary` and `anchors` say: findings and page of each in one file."""
