// Package crds names the modules whose custom resource definitions tests/chart looks at; nothing of them is built.
package crds
