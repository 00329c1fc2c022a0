"""What an anchor vector means downstream: log-linear models, classifiers of label words, students, the certificate."""
