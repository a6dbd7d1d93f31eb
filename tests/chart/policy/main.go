// policy applies a MutatingAdmissionPolicy to a pod with the API server's own code, as the admission plugin does:
//
//	policy POLICY.yaml < pod.json > mutated.json
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"

	"k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/apiserver/pkg/admission"
	plugincel "k8s.io/apiserver/pkg/admission/plugin/cel"
	"k8s.io/apiserver/pkg/admission/plugin/policy/mutating/patch"
	"k8s.io/apiserver/pkg/admission/plugin/policy/validating"
	"k8s.io/apiserver/pkg/admission/plugin/webhook/matchconditions"
	celconfig "k8s.io/apiserver/pkg/apis/cel"
	"k8s.io/apiserver/pkg/cel/environment"
)

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func main() {
	file, err := os.Open(os.Args[1])
	must(err)
	var policy v1.MutatingAdmissionPolicy
	must(yaml.NewYAMLOrJSONDecoder(file, 4096).Decode(&policy))
	text, err := io.ReadAll(os.Stdin)
	must(err)
	pod := &unstructured.Unstructured{}
	must(json.Unmarshal(text, &pod.Object))

	opts := plugincel.OptionalVariableDeclarations{HasAuthorizer: true}
	compiler, err := plugincel.NewCompositedCompiler(environment.MustBaseEnvSet(environment.DefaultCompatibilityVersion()))
	must(err)
	variables := []plugincel.NamedExpressionAccessor{}
	for _, each := range policy.Spec.Variables {
		variables = append(variables, &validating.Variable{Name: each.Name, Expression: each.Expression})
	}
	compiler.CompileAndStoreVariables(variables, opts, environment.StoredExpressions)
	conditions := []plugincel.ExpressionAccessor{}
	for i := range policy.Spec.MatchConditions {
		conditions = append(conditions, (*matchconditions.MatchCondition)(&policy.Spec.MatchConditions[i]))
	}
	matcher := matchconditions.NewMatcher(compiler.CompileCondition(conditions, opts, environment.StoredExpressions), policy.Spec.FailurePolicy, "policy", "validate", policy.Name)

	kind := schema.GroupVersionKind{Version: "v1", Kind: "Pod"}
	resource := schema.GroupVersionResource{Version: "v1", Resource: "pods"}
	options := &runtime.Unknown{}
	attributes := admission.NewAttributesRecord(pod, nil, kind, "ns", "", resource, "", admission.Create, options, false, nil)
	versioned := &admission.VersionedAttributes{Attributes: attributes, VersionedKind: kind, VersionedObject: admission.NewLazyObject(pod)}
	ctx := compiler.CreateContext(context.Background())
	matched := matcher.Match(ctx, versioned, nil, nil)
	must(matched.Error)
	var out runtime.Object = pod
	if matched.Matches {
		patchOptions := opts
		patchOptions.HasPatchTypes = true
		for _, mutation := range policy.Spec.Mutations {
			condition := &patch.JSONPatchCondition{Expression: mutation.JSONPatch.Expression}
			compiled := compiler.CompileMutatingEvaluator(condition, patchOptions, environment.StoredExpressions)
			must(firstOf(compiled.CompilationErrors()))
			versioned.VersionedObject.Set(out)
			request := patch.Request{
				MatchedResource:     resource,
				VersionedAttributes: versioned,
				ObjectInterfaces:    admission.NewObjectInterfacesFromScheme(runtime.NewScheme()),
				Namespace:           &corev1.Namespace{},
			}
			out, err = patch.NewJSONPatcher(compiled).Patch(ctx, request, celconfig.RuntimeCELCostBudget)
			must(err)
		}
	}
	must(json.NewEncoder(os.Stdout).Encode(out))
}

func firstOf(errors []error) error {
	if len(errors) > 0 {
		return errors[0]
	}
	return nil
}
